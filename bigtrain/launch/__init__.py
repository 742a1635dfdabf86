"""Where processes run: hostfiles, Slurm, Kubernetes, and the doctor that looks at hosts first."""
