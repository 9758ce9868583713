"""What measures or checks an installation or a run: advise, doctor, verify."""
