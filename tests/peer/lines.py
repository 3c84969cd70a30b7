"""How a driver of torch's tests tells `run.py` what came of each."""

from __future__ import annotations

import json
import re
import time
import unittest


class Lines(unittest.TestResult):
    """Prints a line of JSON as each test ends."""

    def startTest(self, test):
        super().startTest(test)
        self.name, self.outcome, self.why, self.began = test._testMethodName, "passed", "", time.time()
        print(json.dumps({"began": self.name}), flush=True)

    def note(self, outcome, why):
        self.outcome, self.why = outcome, why

    def addSkip(self, test, reason):
        self.note("skipped", reason)

    def addFailure(self, test, error):
        errors = re.findall(r"^(?:\w+\.)*\w*(?:Error|Exception)\b.*", str(error[1]), flags=re.M)
        self.note("failed", (errors[-1] if errors else str(error[1]).strip().splitlines()[-1])[:160])

    addError = addFailure

    def stopTest(self, test):
        took = round(time.time() - self.began, 1)
        print(json.dumps({"test": self.name, "outcome": self.outcome, "why": self.why, "seconds": took}), flush=True)
