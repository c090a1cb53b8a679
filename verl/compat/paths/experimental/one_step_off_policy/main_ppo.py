from verl.trainer.command import not_built


def main(argv: list[str] | None = None) -> int:
    """Upstream's program; it says that it is not built."""
    return not_built("verl.experimental.one_step_off_policy.main_ppo", "one-step-off training")


if __name__ == "__main__":
    raise SystemExit(main())
