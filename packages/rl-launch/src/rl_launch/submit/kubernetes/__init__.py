"""Runs as RayJobs of KubeRay: the manifests, and how they are applied, followed and deleted with kubectl."""
