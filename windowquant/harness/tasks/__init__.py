"""lmms-eval tasks that lmms-eval does not have: IntentQA, and `describe` of the mini data.

`lmms-eval --include_path <this folder> --tasks windowquant_intentqa,windowquant_describe` finds them. The
table is looked for in `datasets/<task>` below the working folder, the videos below HF_HOME.
"""
