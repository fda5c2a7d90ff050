"""Files to run Slipstream beside Prometheus and Grafana; ``deploy.dashboards`` writes the dashboards."""
