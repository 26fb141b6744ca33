"""What every stage uses: paths and atomic files, checked parameters, the command line, errors in words."""
