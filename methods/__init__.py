"""One file per method. A method is a frozen dataclass, reached through the `_target_` of configs/method/*.yaml."""
