"""Whether an MLflow server or database answers, in seconds; MLflow itself would try for minutes.

A database that is down costs MLflow ten tries (100 s), an unreachable server 247 s. So one try is made before, with limits
of its own, and MLflow is told to try few times after it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from pipeline.core import artifacts
from pipeline.core.errors import ArtifactError

ANSWER_S = 5  # for the first answer; what follows may take longer, as a loaded server does
REQUEST_S = 30
TIMEOUT = {"postgresql": "connect_timeout", "mysql": "connect_timeout", "mssql": "login_timeout"}  # the drivers' own words
PACKAGES = {"psycopg": "'psycopg[binary]'", "psycopg2": "psycopg2-binary", "MySQLdb": "mysqlclient"}  # where names differ
LIMITS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": str(REQUEST_S),
    "PGCONNECT_TIMEOUT": str(ANSWER_S),
    "AWS_MAX_ATTEMPTS": "2",  # S3 as the artifact store: botocore's
}


def reach(uri: str) -> None:
    """Return once what is behind an MLflow address has answered; a sqlite file that is not there is made, whole or not at all.

    Raises `ArtifactError` for a missing driver, and whatever the network or the driver raises.
    """
    for name, value in LIMITS.items():
        os.environ.setdefault(name, value)
    scheme = urlsplit(uri).scheme.partition("+")[0]
    if scheme in ("http", "https"):
        _ask_server(uri)
    elif scheme in TIMEOUT:
        _ask_database(uri, TIMEOUT[scheme])
    elif scheme == "sqlite":
        _make_sqlite(uri)


def _ask_server(uri: str) -> None:
    """Any answer will do, even one that refuses: then MLflow's own request says why.

    Certificates are left to MLflow, which has settings of its own for them; no name or password is sent.
    """
    import httpx2

    bare = re.sub(r"://[^/]*@", "://", uri).rstrip("/")
    try:
        httpx2.get(f"{bare}/health", timeout=ANSWER_S, verify=False)
    except httpx2.TimeoutException:
        raise TimeoutError(f"no answer within {ANSWER_S} s") from None
    except httpx2.HTTPError as e:
        if "ssl" not in str(e).lower():
            raise


def _ask_database(uri: str, timeout: str) -> None:
    import sqlalchemy

    try:
        engine = sqlalchemy.create_engine(uri, poolclass=sqlalchemy.NullPool, connect_args={timeout: ANSWER_S})
    except ModuleNotFoundError as e:
        wanted = PACKAGES.get(e.name or "", e.name)
        raise ArtifactError(f"MLflow at {without_password(uri)} needs a driver: pip install {wanted}") from None
    engine.connect().close()


def _make_sqlite(uri: str) -> None:
    """Make MLflow's tables beside the file and rename them: killed amid them, a database would never open again."""
    import sqlalchemy

    name = sqlalchemy.make_url(uri).database
    if not name or name == ":memory:":
        raise ArtifactError(f"MLflow at {uri} would be in memory, and no run would stay; give it a file: sqlite:///mlflow.db")
    if Path(name).exists():
        return
    from mlflow import MlflowClient

    with artifacts.atomic_file(Path(name)) as tmp:
        MlflowClient(tracking_uri=f"sqlite:///{tmp}").search_experiments(max_results=1)


def without_password(text: str) -> str:
    """Addresses in a text without their `user:password@`."""
    return re.sub(r"://\S*@", "://", text)
