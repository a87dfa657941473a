"""What users import from the package exists and is documented."""

from rl_core.testing.public_names import PublicNamesSuite


class TestPublicNames(PublicNamesSuite):
    packages = ("rl_core", "rl_core.testing", "rl_core.torch")
