"""What lies honestly beside a model, or in it, raises no alarm; the same bytes in a dishonest place do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardmill.verify.formats.zeros import Run
from shardmill.verify.questions.block_scales import BlockLook
from shardmill.verify.questions.integrity import integrity
from shardmill.verify.questions.lint import lint
from shardmill.verify.reading.source import Folder
