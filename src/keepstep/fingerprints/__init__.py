"""What a worker notes of every step, for `keepstep verify`: hashes of all that makes the next step what it is."""
