"""The fixtures of documents and deployments that are tried with real coordinators and stores."""

from tests.support.coordinators import (
    api,
    coordinator,
    job,
    own_coordinator,
    own_view,
    patient_coordinator,
    quick_coordinator,
    served,
    service,
    service_url,
    start_coordinator,
    view,
)
from tests.support.data.real_data import digits, flights
from tests.support.servers.s3_server import s3, s3_server

__all__ = [
    "api",
    "coordinator",
    "digits",
    "flights",
    "job",
    "own_coordinator",
    "own_view",
    "patient_coordinator",
    "quick_coordinator",
    "s3",
    "s3_server",
    "served",
    "service",
    "service_url",
    "start_coordinator",
    "view",
]
