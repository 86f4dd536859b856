"""Build what a node runs, out here, where the package registries are: python -m e2e_kit.prepare"""

import sys
import time

from cluster_kit.errors import ClusterError
from cluster_kit.go_program import cache_folder, locked
from e2e_kit import images, prerequisites, programs


def prepare() -> None:
    """Build programs and images; whoever comes while another process does waits for it.

    Raises:
        ClusterError: this machine cannot, or a build failed.
    """
    prerequisites.check()
    with locked(cache_folder() / "e2e-prepare.lock"):
        programs.build_all()
        started_s = time.monotonic()
        images.build_all()
        print(f"e2e: images ready after {time.monotonic() - started_s:.0f} s", flush=True)
        for image in images.ALL:
            print(f"e2e: {image} {images.size(image)}", flush=True)


if __name__ == "__main__":
    try:
        prepare()
    except ClusterError as error:
        sys.exit(f"e2e: {error}")
