"""What leaves clients under noise, and what that costs them: releases, their ledger, and its figures."""
