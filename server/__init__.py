"""The reference server: transformers' own generate behind the OpenAI HTTP contract, with an account of its own waste."""

__version__ = "0.1.0"
