"""What setup.cfg cannot say: on an index page the links and pictures of the README have to be absolute."""

import re
from pathlib import Path

from setuptools import setup

HOME = "https://github.com/celery-idempotent/celery-idempotent/blob/main/"
PICTURES = "https://raw.githubusercontent.com/celery-idempotent/celery-idempotent/main/"

readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
pictures = re.sub(r"(!\[[^\]]*\]\()(?!https?:)", rf"\g<1>{PICTURES}", readme)
setup(long_description=re.sub(r"\]\((?!https?:)(?=(#?))", lambda link: f"]({HOME}{link[1] and 'README.md'}", pictures))
