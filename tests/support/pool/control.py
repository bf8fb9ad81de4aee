"""What tests of the control plane share."""

TOKEN = "an admin token"
ADMIN = {"Authorization": f"Bearer {TOKEN}"}


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s
