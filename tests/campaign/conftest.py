"""The S3 server of the campaign."""

from collections.abc import Iterator

import pytest
from s3_server import S3Server, s3_server, why_not


@pytest.fixture
def s3() -> Iterator[S3Server]:
    """An S3 server with an empty bucket, to which the variables of the environment lead."""
    if reason := why_not():
        pytest.skip(reason)
    with s3_server() as server:
        yield server
