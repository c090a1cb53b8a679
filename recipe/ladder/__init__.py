"""From GRPO to Dr. GRPO and GSPO: one change after the other, as settings."""
