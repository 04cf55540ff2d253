"""dspark_jax: the DSpark speculative-decoding drafter for JAX.

The data's way: config.py -> checkpoint/ -> heads.py -> candidates.py -> draft.py (called by api.py and
serving.py) -> verify.py.
"""

from ._version import __version__ as __version__
from .checkpoint.load import load_head as load_head
from .confidence.calibration import Calibration as Calibration
from .confidence.calibration import fit_calibration as fit_calibration
from .confidence.calibration import load_calibration as load_calibration
from .confidence.costs import CostTable as CostTable
from .confidence.costs import profile_sps as profile_sps
from .confidence.schedule import PrefixScheduler as PrefixScheduler
from .confidence.schedule import ThresholdPolicy as ThresholdPolicy
from .config import DraftConfig as DraftConfig
from .config import DSparkConfig as DSparkConfig
from .decoding.generate import Generated as Generated
from .decoding.generate import generate as generate
from .decoding.generate import stream as stream
from .drafting.api import draft_block as draft_block
from .drafting.api import draft_from_logits as draft_from_logits
from .drafting.api import teacher_forced_logits as teacher_forced_logits
from .drafting.drafter import Drafter as Drafter
from .drafting.drafter import load_drafter as load_drafter
from .drafting.factories import make_buffer as make_buffer
from .drafting.factories import make_draft_fn as make_draft_fn
from .drafting.factories import make_draft_from_logits_fn as make_draft_from_logits_fn
from .transformer.target import Target as Target
from .transformer.target import load_target as load_target
from .types import DraftBlock as DraftBlock
from .types import DraftBuffer as DraftBuffer
from .types import DraftSampling as DraftSampling
from .verification.filter import TargetFilter as TargetFilter
from .verification.verify import Verified as Verified
from .verification.verify import verify_block as verify_block
