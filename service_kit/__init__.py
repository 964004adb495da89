"""What every service process needs: settings, errors, gRPC server, lifecycle. No domain words."""
