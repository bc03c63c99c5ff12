"""`kdo demo tokens`: a masked diffusion model of handwritten digits, distilled in four ways and compared.

scikit-learn's 1,797 scans of 8 x 8 pixels are taken as what they are: 64 tokens of 17 grey levels. A teacher
learns to fill in masked pixels of a digit of a given class. Four students a tenth of its size start from the
same weights and make the same number of updates: on hard labels, on the teacher's scores of corrupted scans,
on the teacher's scores of their own samples, and on a mixture of both.
"""

from keras_diffusion_opd.demos.tokens.command import main
from keras_diffusion_opd.demos.tokens.experiment import run
from keras_diffusion_opd.demos.tokens.settings import Settings

__all__ = ["Settings", "main", "run"]
