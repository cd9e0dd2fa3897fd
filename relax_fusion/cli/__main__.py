"""``python -m relax_fusion.cli``, for installs whose scripts are not on the path."""

import sys

from relax_fusion_command import main

sys.exit(main())
