"""loadgen: a load generator for LLM inference servers that tells the truth, and says why."""

__version__ = "0.1.0"
