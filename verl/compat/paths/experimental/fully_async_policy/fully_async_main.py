"""Upstream's program; it says that it is not built."""

from verl.trainer.command import not_built


def main(argv: list[str] | None = None) -> int:
    return not_built("verl.experimental.fully_async_policy.fully_async_main", "fully asynchronous training")


if __name__ == "__main__":
    raise SystemExit(main())
