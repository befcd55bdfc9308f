"""`keepstep tune`: searches a script's best arguments with Ray Tune; each trial is a keepstep run of its own."""
