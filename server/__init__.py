"""The reference server: transformers' own generate behind the OpenAI HTTP contract, accounting for its waste."""

__version__ = "0.1.0"
