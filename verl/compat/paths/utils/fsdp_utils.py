"""FSDP2 by hand under upstream's path; `verl.compat.forms.fsdp2` does it."""

from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from verl.compat import absent_names
from verl.compat.forms.fsdp2 import clip_gradients as fsdp2_clip_grad_norm_
from verl.compat.forms.fsdp2 import empty_off_first as init_fn
from verl.compat.forms.fsdp2 import fsdp_version
from verl.compat.forms.fsdp2 import init_weights_on_first as get_init_weight_context_manager
from verl.compat.forms.fsdp2 import load_whole as fsdp2_load_full_state_dict
from verl.compat.forms.fsdp2 import move_model_back as load_fsdp_model_to_gpu
from verl.compat.forms.fsdp2 import move_model_to_host as offload_fsdp_model_to_cpu
from verl.compat.forms.fsdp2 import move_optimizer as load_fsdp_optimizer
from verl.compat.forms.fsdp2 import move_optimizer as offload_fsdp_optimizer
from verl.compat.forms.fsdp2 import shard_largest as get_shard_placement_fn
from verl.compat.forms.fsdp2 import shard_model as apply_fsdp2
from verl.compat.forms.fsdp2 import wrap_policy as get_fsdp_wrap_policy

__getattr__ = absent_names(__name__)
