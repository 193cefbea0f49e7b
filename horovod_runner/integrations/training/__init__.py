"""`fit` and the training core of all estimators: what a training is, and how its ranks run it.

    fit                          fit.py         describes a training; where.py: its place
    Training                     training.py    a plain description: model, loss, columns, options
      check_source               checks.py      tries it on a few rows, on the driver
      train                      training.py    the function that the ranks run
        TorchTraining.train      torch.py       leads to the loop in torch_loop.py
        KerasTraining.train      keras.py       leads to the loop in keras_loop.py
        LightningTraining.train  lightning.py   leads to the loop in lightning_loop.py
      trained_model              torch.py ...   the model with the weights that rank 0 returned
    Fitted                       fitted.py      what fit returns

`rows` splits a DataFrame into rows to train and to validate with. `horovod_runner.ml` and
`horovod.spark`'s estimators describe their trainings to it.
"""
