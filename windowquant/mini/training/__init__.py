"""How the stand-in checkpoints are trained: vision first, into the words' space; then option letters; then videos."""
