"""A LangGraph agent, trained through the run's OpenAI endpoint."""
