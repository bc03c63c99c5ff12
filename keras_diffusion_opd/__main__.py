"""`python -m keras_diffusion_opd` is the command `kdo`."""

import sys

from keras_diffusion_opd.cli import main

if __name__ == "__main__":
    sys.exit(main())
