"""The names that Orbax gives to the files and directories of a checkpoint."""

STEP_METADATA = "_CHECKPOINT_METADATA"  # of a step, or of an item that was saved without a step
TREE_METADATA = "_METADATA"  # of an item with arrays
SHARDINGS = "_sharding"
OCDBT_MANIFEST = "manifest.ocdbt"
COMMIT_FILE = "commit_success.txt"  # written last where there is no atomic rename
TEMPORARY = ".orbax-checkpoint-tmp"  # in the name of a checkpoint that is not complete yet
