"""Says a text in the voice of a recording, without training: the recipe's script, with all its flags.

python scripts/zero_shot_clone.py --ref-audio voice.wav --text "Hello, this is my cloned voice." --output output.wav \\
    --i-have-consent
"""

from __future__ import annotations

import subprocess
import sys

from keepstep.recipes import recipe_folder

if __name__ == "__main__":
    sys.exit(subprocess.call([sys.executable, str(recipe_folder("qwen3_tts") / "zero_shot_clone.py"), *sys.argv[1:]]))
