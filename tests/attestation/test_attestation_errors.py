from __future__ import annotations

import pytest

from attestation import errors
from attestation.result import AppraisalRefused, EndorsementsRefused, EvidenceRefused, PolicyRefused


def test_an_error_says_code_found_and_expected() -> None:
    error = errors.FormatError("json.float", found="1.0", expected="whole numbers", hint="get the file again")
    assert str(error) == "json.float: found 1.0, expected whole numbers"
    assert error.as_payload() == {
        "code": "json.float",
        "found": "1.0",
        "expected": "whole numbers",
        "hint": "get the file again",
    }


@pytest.mark.parametrize(
    ("family", "status"),
    [
        (errors.FormatError, 6),
        (errors.SignatureRefused, 6),
        (errors.EvidenceNotGenuine, 3),
        (errors.EndorsementRefused, 5),
        (errors.PolicyInvalid, 78),
        (EvidenceRefused, 3),
        (EndorsementsRefused, 5),
        (PolicyRefused, 4),
    ],
)
def test_each_family_owns_one_exit_status(family: type[errors.LetheError], status: int) -> None:
    assert family.exit_status == status
    assert issubclass(family, errors.LetheError)


def test_a_refused_appraisal_belongs_to_its_family() -> None:
    assert issubclass(EvidenceRefused, errors.EvidenceNotGenuine)
    assert issubclass(EndorsementsRefused, errors.EndorsementRefused)
    assert not issubclass(PolicyRefused, errors.EvidenceNotGenuine | errors.EndorsementRefused)
    assert issubclass(PolicyRefused, AppraisalRefused)
