"""What models are trained and scored on: text as memory-mapped tokens, and sequences made on the spot."""

from abc_attn.data.segments import Segments
from abc_attn.data.synthetic import Copy, Recall
from abc_attn.data.text import SPLITS, Corpus, Source, build_corpus, check_tokenizer, find_files

__all__ = ["SPLITS", "Copy", "Corpus", "Recall", "Segments", "Source", "build_corpus", "check_tokenizer", "find_files"]
