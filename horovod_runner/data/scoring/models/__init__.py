"""The kinds of models: recognized on the driver, written to a file, loaded where rows are scored.

    torch.nn.Module, LightningModule, TorchScript, torch.export    torch
    keras.Model                                                    keras
    models logged to MLflow                                        mlflow
    Checkpoint with the function that builds the network           checkpoint

Any other callable is a function from a dict of arrays to arrays: `kind`. May import `checkpoints`,
`common`, `host` and `errors`. Must not import the rest of `scoring`; each file imports only its own
framework.
"""
