"""What models are trained and scored on: text as memory-mapped tokens, and sequences made on the spot."""

from abc_attn.data.batches import TokenBatches
from abc_attn.data.pairs import PairCorpus, build_pairs
from abc_attn.data.parallel import Pair, ParallelSource, find_parallel_files
from abc_attn.data.segments import Segments
from abc_attn.data.synthetic import Copy, Recall
from abc_attn.data.text import SPLITS, Corpus, Source, build_corpus, check_tokenizer, find_files

__all__ = [
    "SPLITS",
    "Copy",
    "Corpus",
    "Pair",
    "PairCorpus",
    "ParallelSource",
    "Recall",
    "Segments",
    "Source",
    "TokenBatches",
    "build_corpus",
    "build_pairs",
    "check_tokenizer",
    "find_files",
    "find_parallel_files",
]
