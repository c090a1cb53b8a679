"""Names of upstream that have no meaning here, and what has."""

ABSENT: dict[str, str] = {}
