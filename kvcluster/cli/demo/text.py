"""The questions that the demo asks about its document.

Every request begins with the same few thousand tokens, and a question follows them: the shape of a system prompt, a
retrieved page or a conversation so far.
"""

from __future__ import annotations

QUESTIONS = (
    "What is a lambda expression, and how does it differ from a function that def makes?",
    "When is an object that nothing refers to any more collected?",
    "What does the with statement do with an exception that its block raises?",
)


def ask(question: str) -> str:
    """Returns the text that follows the document."""
    return f"\n\nQuestion: {question}\nAnswer:"
