"""A ReAct agent as a LangGraph graph: the model answers or calls tools, whose results return to it.

The graph is LangGraph's own, the model LangChain's `ChatOpenAI`; only its ``base_url`` is the run's.
"""

from __future__ import annotations
