"""What the demo reads: English that is on every machine, the help texts of the Python language.

A document of a few thousand tokens that every request begins with, and questions that follow it: the shape of a
system prompt, a retrieved page or a conversation so far.
"""

from __future__ import annotations

from pydoc_data.topics import topics

QUESTIONS = (
    "What is a lambda expression, and how does it differ from a function that def makes?",
    "When is an object that nothing refers to any more collected?",
    "What does the with statement do with an exception that its block raises?",
)


def document() -> str:
    """Some hundred thousand characters, the longest topics first; whoever needs less cuts it."""
    return "\n\n".join(topics[name].strip() for name in sorted(topics, key=lambda name: (-len(topics[name]), name)))


def ask(question: str) -> str:
    """What follows the document."""
    return f"\n\nQuestion: {question}\nAnswer:"
