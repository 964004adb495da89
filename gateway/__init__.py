"""The public door: gRPC and OpenAI HTTP in front of the ledger."""
