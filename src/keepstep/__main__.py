"""`python -m keepstep`."""

import sys

from keepstep.cli import main

sys.exit(main())
