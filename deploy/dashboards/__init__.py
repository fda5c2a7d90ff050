"""Grafana dashboards as code: ``python -m deploy.dashboards`` writes them, ``--check`` compares."""
