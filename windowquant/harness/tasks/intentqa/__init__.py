"""IntentQA (Li et al., ICCV 2023) as an lmms-eval task."""
