"""Play what ranks did in virtual time, on a machine that is not here."""
