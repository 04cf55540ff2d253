"""dspark_jax: the DSpark speculative-decoding drafter for JAX.

The data's way: config.py -> checkpoint/ -> heads.py -> candidates.py -> draft.py (called by api.py and
serving.py) -> verify.py.
"""

from .api import draft_block as draft_block
from .api import draft_from_logits as draft_from_logits
from .api import teacher_forced_logits as teacher_forced_logits
from .calibration import Calibration as Calibration
from .calibration import fit_calibration as fit_calibration
from .calibration import load_calibration as load_calibration
from .checkpoint.load import load_head as load_head
from .config import DraftConfig as DraftConfig
from .config import DSparkConfig as DSparkConfig
from .costs import CostTable as CostTable
from .costs import profile_sps as profile_sps
from .drafter import Drafter as Drafter
from .drafter import load_drafter as load_drafter
from .generate import Generated as Generated
from .generate import generate as generate
from .generate import stream as stream
from .schedule import PrefixScheduler as PrefixScheduler
from .schedule import ThresholdPolicy as ThresholdPolicy
from .serving import make_buffer as make_buffer
from .serving import make_draft_fn as make_draft_fn
from .serving import make_draft_from_logits_fn as make_draft_from_logits_fn
from .target import Target as Target
from .target import load_target as load_target
from .target_filter import TargetFilter as TargetFilter
from .types import DraftBlock as DraftBlock
from .types import DraftBuffer as DraftBuffer
from .types import DraftSampling as DraftSampling
from .verify import Verified as Verified
from .verify import verify_block as verify_block

__version__ = "0.1.0"
