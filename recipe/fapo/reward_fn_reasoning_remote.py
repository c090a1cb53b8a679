"""`compute_score_fapo` under the name that scripts use whose reward model is served elsewhere: give it ``address``."""

from recipe.fapo.reward_fn_reasoning import compute_score_fapo as compute_score_fapo
