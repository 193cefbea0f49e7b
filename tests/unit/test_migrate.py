"""`horovod-runner migrate`: what it changes in old code, and what it only tells."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from horovod_runner.tools.commands import cli
from tests.programs import run_python

pytest.importorskip("libcst")

from horovod_runner.tools.migrate.rewrite import rewrite

# What some words in the texts stand for.
WORDS = {
    "TORCH": "import horovod.torch as hvd\nimport torch\nfrom horovod_runner import HorovodRunner",
    "ENDLESS": (
        "itertools.chain.from_iterable(itertools.repeat(converter.to_torch(64, shuffle=True)))"
    ),
    "ROWS": "contextlib.nullcontext(data.to_tf(8, shuffle=True).repeat())",
    "VALID": "contextlib.nullcontext(other.to_tf(8, shuffle=True))",
    "KERAS": "import tensorflow as tf\nimport horovod_runner.keras as hvd\nhvd.init()",
}
# What it is about, and what is changed: a - is before what only the old text has, a + before what
# only the new text has.
CHANGED = {
    "sparkdl": """
        - from sparkdl import HorovodRunner
        - from sparkdl.horovod import log_to_driver
        - from sparkdl.horovod.tensorflow.keras import LogCallback
        + from horovod_runner import HorovodRunner
        + from horovod_runner import log_to_driver
        + from horovod_runner.keras.callbacks import LogCallback
        """,
    "sparkdl as a module": """
        - import sparkdl
        - sparkdl.HorovodRunner(np=2).run(train)
        - sparkdl.horovod.log_to_driver("x")
        + import horovod_runner
        + horovod_runner.HorovodRunner(np=2).run(train)
        + horovod_runner.log_to_driver("x")
        """,
    "horovod.keras": """
        - import horovod.keras as hvd
        - from horovod.tensorflow.keras.callbacks import MetricAverageCallback
        - from horovod.tensorflow import keras as other
        + import horovod_runner.keras as hvd
        + from horovod_runner.keras.callbacks import MetricAverageCallback
        + from horovod_runner import keras as other
        """,
    "estimators of horovod.spark": """
          import torch
        + import horovod_runner.horovod_spark
        +
        + horovod_runner.horovod_spark.install()
        +
          from horovod.spark.torch import TorchEstimator
        """,
    "horovod.spark.run": """
        - import horovod.spark
        + from horovod_runner import HorovodRunner

          def train(rate, epochs):
              return rate

        - horovod.spark.run(train, args=(0.1,), kwargs={"epochs": 2}, num_proc=4, verbose=2)[0]
        + HorovodRunner(np=4, driver_log_verbosity="all").run_all(train, rate=0.1, epochs=2)[0]
        """,
    "horovod.spark.run without a number of processes": """
        + import horovod_runner.horovod_spark
        +
        + horovod_runner.horovod_spark.install()
        +
          import horovod.spark
          horovod.spark.run(train)
        """,
    "TorchDistributor": """
        - from pyspark.ml.torch.distributor import TorchDistributor
        + from horovod_runner import HorovodRunner

          def train(rate, *, epochs):
              return rate

        - TorchDistributor(2, use_gpu=False).run(
        -     train, 0.1, epochs=3)
        - distributor = TorchDistributor(num_processes=n, local_mode=False)
        - distributor.run(train, rate, epochs=3)
        + HorovodRunner(np=-2, gpus_per_rank=0).run(
        +     train, rate=0.1, epochs=3)
        + distributor = HorovodRunner(np=n, driver_log_verbosity="all")
        + distributor.run(train, rate=rate, epochs=3)
        """,
    "np by its position": """
          from horovod_runner import HorovodRunner
        - HorovodRunner(2).run(train)
        + HorovodRunner(np=2).run(train)
        """,
    "a session": """
          KERAS
          from tensorflow.keras import backend as K

          # One GPU for each rank.
        - config = tf.ConfigProto()
        - config.gpu_options.allow_growth = True
        - config.gpu_options.visible_device_list = str(hvd.local_rank())
        - K.set_session(tf.Session(config=config))
        + gpus = tf.config.list_physical_devices("GPU")
        + for gpu in gpus:
        +     tf.config.experimental.set_memory_growth(gpu, True)
        + if gpus:
        +     tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
        """,
    "a session without GPUs": """
          import tensorflow as tf

          def predict():
        -     config = tf.compat.v1.ConfigProto(device_count={'GPU': 0})
        -     config.intra_op_parallelism_threads = 2
        -     tf.compat.v1.keras.backend.set_session(tf.compat.v1.Session(config=config))
        +     tf.config.set_visible_devices([], "GPU")
        +     tf.config.threading.set_intra_op_parallelism_threads(2)
        """,
    "names of TensorFlow 1": """
          import tensorflow as tf
        - x = tf.log(tf.random_uniform([2]))
        + x = tf.math.log(tf.random.uniform([2]))
        """,
    "compile": """
          from tensorflow import keras
        - model.compile("sgd", experimental_run_tf_function=False, loss="mse")
        + model.compile("sgd", loss="mse")
          model.compile("sgd",
        -               loss="mse",  # the loss
        -               experimental_run_tf_function=False)
        +               loss="mse")
        """,
    "generators": """
          import keras
        - model.fit_generator(batches, 10, epochs=2, workers=4, use_multiprocessing=True)
        - model.fit_generator(generator=batches, steps_per_epoch=10)
        - model.evaluate_generator(batches, len(batches))
        - model.fit(x, y, max_queue_size=20)
        + model.fit(batches, steps_per_epoch=10, epochs=2)
        + model.fit(x=batches, steps_per_epoch=10)
        + model.evaluate(batches, steps=len(batches))
        + model.fit(x, y)
        """,
    "optimizers": """
          import tensorflow as tf
          from keras.optimizers import SGD
        - opt = tf.keras.optimizers.legacy.Adam(lr=0.1, decay=0.0)
        - other = SGD(lr=0.1)
        - print(opt.lr, other.variables(), model.optimizer.lr)
        - opt.lr = 0.2
        - tf.keras.backend.set_value(model.optimizer.lr, 0.1)
        - rate = tf.keras.backend.get_value(opt.lr)
        + opt = tf.keras.optimizers.Adam(learning_rate=0.1)
        + other = SGD(learning_rate=0.1)
        + print(opt.learning_rate, other.variables, model.optimizer.learning_rate)
        + opt.learning_rate = 0.2
        + model.optimizer.learning_rate = 0.1
        + rate = float(opt.learning_rate.numpy())
        """,
    "a learning rate of several lines": """
          from keras import backend as K
        - K.set_value(model.optimizer.lr,
        -             0.1
        -             * size)
        + model.optimizer.learning_rate = (0.1
        +             * size)
        """,
    "losses": """
          import keras
          import tensorflow as tf
        - from keras.losses import mse
        - from tensorflow.keras.metrics import mean_absolute_error
        - model.compile("sgd", tf.keras.losses.mean_squared_error, [keras.metrics.MAE])
        + from keras.losses import mean_squared_error as mse
        + from tensorflow.keras.metrics import MAE as mean_absolute_error
        + model.compile("sgd", tf.keras.losses.MSE, [keras.metrics.mean_absolute_error])
          loss = tf.keras.losses.MSE(y, p) + keras.losses.mean_squared_error(y, p)
        """,
    "modules of Keras 2": """
        - from keras.preprocessing.image import ImageDataGenerator
        - from keras.layers.normalization import BatchNormalization
        - from tensorflow.keras.layers.core import Dense
        - from keras.utils import np_utils
        - y = np_utils.to_categorical(y, 10)
        + from tensorflow.keras.preprocessing.image import ImageDataGenerator
        + from keras.layers import BatchNormalization
        + from tensorflow.keras.layers import Dense
        + from keras.utils import to_categorical
        + y = to_categorical(y, 10)
        """,
    "classes": """
          import keras
        - labels = model.predict_classes(x, verbose=0)
        + labels = model.predict(x, verbose=0).argmax(axis=-1)
        """,
    "files of Keras 3": """
          import os
          from tensorflow import keras
        - path = os.path.join(folder, "weights-{epoch}.ckpt")
        + path = os.path.join(folder, "weights-{epoch}.weights.h5")
          keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
        - keras.callbacks.ModelCheckpoint(filepath=folder + '/model.hdf5')
        + keras.callbacks.ModelCheckpoint(filepath=folder + '/model.keras')
          keras.callbacks.ModelCheckpoint("model.h5")
          keras.callbacks.ModelCheckpoint("%s/best.keras" % "/dbfs/models")
        - model.save_weights("end.h5")
        - model.load_weights("end.h5")
        + model.save_weights("end.weights.h5")
        + model.load_weights("end.weights.h5")
        - model.save_weights("models\\\\end.h5")
        + model.save_weights("models\\\\end.weights.h5")
        """,
    "a warm-up without its learning rate": """
          KERAS
        - opt = tf.keras.optimizers.Adam(lr=0.1 * hvd.size())
        - warmup = hvd.callbacks.LearningRateWarmupCallback(verbose=1)
        + opt = tf.keras.optimizers.Adam(learning_rate=0.1 * hvd.size())
        + warmup = hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1 * hvd.size(), verbose=1)
        """,
    "init on the driver": """
          TORCH
        - hvd.init()

          def train():
        +     hvd.init()
              return hvd.rank()

          HorovodRunner(np=2).run(train)
        """,
    "init that is missing": """
          from horovod_runner import HorovodRunner

          def train():
              import horovod.torch as hvd
        +     hvd.init()
              print(hvd.rank())

          runner = HorovodRunner(np=2)
          runner.run(train)
        """,
    "a function that is defined twice": """
          TORCH

          class Net:
              def train(self):
                  pass

          def train():
              return 0

          def train():
        +     hvd.init()
              return hvd.rank()

          HorovodRunner(np=2).run(train)
        """,
    "init that comes too late": """
          import horovod.torch as hvd
        + hvd.init()
          rank = hvd.rank()
          print(rank)
        - hvd.init()
        """,
    "broadcast of a torch model": """
          TORCH
          def train():
              hvd.init()
              net = torch.nn.Linear(1, 1)
              opt = torch.optim.SGD(net.parameters(), lr=0.1 * hvd.size())
              opt = hvd.DistributedOptimizer(opt)
        +     hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        +     hvd.broadcast_optimizer_state(opt, root_rank=0)
              return opt

          HorovodRunner(np=2).run(train)
        """,
    "broadcast of a Keras model": """
          KERAS
          opt = hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.1 * hvd.size()))
        - callbacks = [average]
        + callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), average]
          model.compile(opt, "mse")
          model.fit(x, y, callbacks=callbacks)
        """,
    "broadcast of the model among others with a fit": """
          KERAS
          opt = hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.1 * hvd.size()))
          x = StandardScaler().fit(x).transform(x)
          datagen.fit(x)
          model.compile(opt)
        - model.fit(datagen.flow(x))
        + model.fit(datagen.flow(x), callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
        """,
    "broadcast with callbacks by their position": """
          KERAS
          opt = hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.1 * hvd.size()))
        - model.fit(x, y, 32, 1, 0, [stop])
        + model.fit(x, y, 32, 1, 0, [hvd.callbacks.BroadcastGlobalVariablesCallback(0), stop])
        """,
    "GPU 0": """
          TORCH
          hvd.init()
        - torch.cuda.set_device(0)
        - model.cuda(0).to("cuda:0").to(0)
        - device = torch.device("cuda", 0)
        + torch.cuda.set_device(hvd.local_rank())
        + model.cuda().to("cuda").to("cuda")
        + device = torch.device("cuda")
        """,
    "Lightning 1": """
          import pytorch_lightning as pl
        - trainer = pl.Trainer(accelerator='horovod', max_epochs=2)
        + from horovod_runner.lightning import HorovodStrategy
        + trainer = pl.Trainer(strategy=HorovodStrategy(), max_epochs=2)
        - trainer = pl.Trainer(gpus=1, checkpoint_callback=False)
        - trainer = pl.Trainer(gpus=0, terminate_on_nan=True)
        + trainer = pl.Trainer(devices=1, enable_checkpointing=False, accelerator="gpu")
        + trainer = pl.Trainer(accelerator="cpu", detect_anomaly=True)
        - trainer = pl.Trainer(accelerator="gpu", gpus=-1)
        + trainer = pl.Trainer(accelerator="gpu", devices=-1)
        - trainer = pl.Trainer(gpus=0, accelerator="cpu")
        - trainer = pl.Trainer(gpus="0,1", checkpoint_callback=None)
        + trainer = pl.Trainer(accelerator="cpu")
        + trainer = pl.Trainer(devices="0,1", enable_checkpointing=None, accelerator="gpu")
        """,
    "a converter for torch": """
          TORCH
        - from petastorm.spark import SparkDatasetConverter, make_spark_converter

        - spark.conf.set(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF, "file:///dbfs/tmp/cache")
        - converter = make_spark_converter(df.select("x", "y"))
        - print(len(converter))
        + print(df.select("x", "y").count())

        - def train(rate=0.1):
        + def train(rate=0.1, *, converter):
        +     import contextlib
        +     import itertools
              hvd.init()
        -     with converter.make_torch_dataloader(
        -         batch_size=64, cur_shard=hvd.rank(), shard_count=hvd.size(), workers_count=2
        -     ) as loader:
        +     with contextlib.nullcontext(ENDLESS) as loader:
                  rows = iter(loader)
        -         for _ in range(len(converter) // 64):
        +         for _ in range(converter.rows // 64):
                      batch = next(rows)

        - HorovodRunner(np=2).run(train, rate=0.2)
        - converter.delete()
        + HorovodRunner(np=2).run(train, rate=0.2, converter=df.select("x", "y"))
        """,
    "a converter for TensorFlow": """
          TORCH
        - from petastorm.spark import make_spark_converter

        - converter = make_spark_converter(df)
        - other = make_spark_converter(more)

        - def train(data):
        + def train(data, other):
        +     import contextlib
              hvd.init()
        -     with data.make_tf_dataset(
        -         batch_size=8, cur_shard=hvd.rank(), shard_count=hvd.size()
        -     ) as rows, other.make_tf_dataset(8, cur_shard=hvd.rank(), num_epochs=1) as valid:
        -         rows = rows.shuffle(9).map(lambda row: (row.x, row.y)).map(lambda r: r.x)
        -         valid = valid.map(lambda row: (row.x, row.y))
        -         model.fit(rows, steps_per_epoch=len(data) // 8)
        +     with ROWS as rows, VALID as valid:
        +         rows = rows.shuffle(9).map(lambda row: (row["x"], row["y"])).map(lambda r: r.x)
        +         valid = valid.map(lambda row: (row["x"], row["y"]))
        +         model.fit(rows, steps_per_epoch=data.rows // 8)

        - HorovodRunner(np=-1).run(train, data=converter)
        - HorovodRunner(np=2).run(train, data=converter)
        + HorovodRunner(np=-1).run(train, data=df, other=more)
        + HorovodRunner(np=2).run(train, data=df, other=more)
        """,
    "converters of one function": """
          TORCH
        - from petastorm.spark import make_spark_converter

        - some = make_spark_converter(df)
        - other = make_spark_converter(
        -     more.select("x")
        -         .limit(9)
        - )

        - def train(rate=0.1, *args, **options):
        + def train(rate=0.1, *args, some, other, **options):
        +     import contextlib
              hvd.init()
        -     with some.make_torch_dataloader(8, cur_shard=hvd.rank(), num_epochs=1) as rows:
        +     with contextlib.nullcontext(some.to_torch(8, shuffle=True)) as rows:
                  for batch in rows:
        -             print(batch, len(other))
        +             print(batch, other.rows)

        - HorovodRunner(np=2).run(train, rate=0.2)
        + HorovodRunner(np=2).run(train, rate=0.2, some=df, other=more.select("x")
        +         .limit(9))
        """,
    "comments and blocks": """
          TORCH
          if True:
              # Once.
        -     hvd.init()
        +     pass

          def train():
              # Its estimator.
        +     import horovod_runner.horovod_spark
        +
        +     horovod_runner.horovod_spark.install()
        +
              from horovod.spark.torch import TorchEstimator
              hvd.init()
              if hvd.rank() == 0:
                  import tensorflow as tf
                  # No session.
        -         tf.keras.backend.set_session(tf.Session())

          HorovodRunner(np=2).run(train)
        """,
}
# What it is about: the text, and words of what is said.
TOLD = {
    "a hook of Lightning 1": (
        """
        import pytorch_lightning as pl
        class Net(pl.LightningModule):
            def validation_epoch_end(self, outputs):
                self.log("loss", sum(outputs))
        """,
        "write on_validation_epoch_end(self), without outputs",
    ),
    "an argument of Lightning 1": (
        """
        import pytorch_lightning as pl
        pl.Trainer(resume_from_checkpoint="last.ckpt", max_epochs=2)
        """,
        "trainer.fit(model, ckpt_path=...)",
    ),
    "a ModelCheckpoint of Lightning 1": (
        """
        import pytorch_lightning as pl
        pl.Trainer(checkpoint_callback=pl.callbacks.ModelCheckpoint("x"))
        """,
        "takes a ModelCheckpoint among callbacks=[...]",
    ),
    "GPUs that may be none": (
        "import pytorch_lightning as pl\npl.Trainer(gpus=args.gpus)\n",
        'accelerator="gpu" if gpus else "cpu"',
    ),
    "GPUs beside devices": (
        "import pytorch_lightning as pl\npl.Trainer(gpus=1, devices=1)\n",
        "devices is given as well",
    ),
    "GPUs beside other arguments": (
        "import pytorch_lightning as pl\npl.Trainer(gpus=1, **options)\n",
        "among the arguments with a star",
    ),
    "a format of Keras 2": (
        """
        import keras
        model.save("model", save_format="tf")
        """,
        'call model.export(...), without save_format="tf"',
    ),
    "broadcast where it is not known which fit trains": (
        """
        KERAS
        opt = hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.1 * hvd.size()))
        datagen.fit(x)
        build(opt).fit(x)
        """,
        "callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)] of fit",
    ),
    "broadcast beside other arguments": (
        """
        KERAS
        opt = hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.1 * hvd.size()))
        model.fit(x, **options)
        """,
        "gives all ranks those of rank 0",
    ),
    "broadcast where hvd has no callbacks": (
        """
        import horovod.tensorflow as hvd
        import tensorflow as tf
        hvd.init()
        opt = hvd.DistributedOptimizer(tf.keras.optimizers.Adam(0.1 * hvd.size()))
        model.fit(x)
        """,
        "rank 0: horovod_runner.keras.callbacks.BroadcastGlobalVariablesCallback(0)",
    ),
    "classes of one output": (
        "import keras\nmodel.add(keras.layers.Dense(1))\nmodel.predict_classes(x)\n",
        "(model.predict(x) > 0.5) of one output",
    ),
    "an ending that may be that of another file": (
        "import keras\nmodel.save_weights(run + '.h5')\nread(run + '.h5')\n",
        "ends with .weights.h5",
    ),
    "other names of sparkdl": ("from sparkdl import DeepImageFeaturizer\n", "no counterpart"),
    "a program for TorchDistributor": (
        """
        from pyspark.ml.torch.distributor import TorchDistributor
        TorchDistributor(2, False).run("train.py", "--rate", "1")
        """,
        "horovod-runner run FILE --np N",
    ),
    "a learning rate that is not given": (
        """
        TORCH
        hvd.init()
        opt = hvd.DistributedOptimizer(torch.optim.Adam(net.parameters()))
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        """,
        "lr=... * hvd.size()",
    ),
    "a learning rate by its position": (
        """
        KERAS
        opt = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1))
        model.fit(x, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
        """,
        "learning_rate=0.1 * hvd.size()",
    ),
    "a learning rate that is not scaled": (
        """
        TORCH
        def make():
            return torch.optim.SGD(net.parameters(), lr=0.1)
        def build():
            opt = hvd.DistributedOptimizer(make())
            hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        def train():
            hvd.init()
            build()
        HorovodRunner(np=2).run(train)
        """,
        "lr=0.1 * hvd.size()",
    ),
    "no average": (
        """
        TORCH
        hvd.init()
        opt = torch.optim.SGD(net.parameters(), lr=0.1 * hvd.size())
        """,
        "every rank trains a model of its own",
    ),
    "init on a driver that needs it": (
        """
        TORCH
        hvd.init()
        rate = 0.1 * hvd.size()
        def train():
            hvd.init()
        HorovodRunner(np=2).run(train)
        """,
        "starts Horovod on the driver",
    ),
    "a loop with a tape": (
        """
        import horovod.tensorflow as hvd
        hvd.init()
        tape = hvd.DistributedGradientTape(tape)
        """,
        "hvd.broadcast_variables(model.variables",
    ),
    "decay": ("import keras\nkeras.optimizers.SGD(0.1, decay=1e-4)\n", "InverseTimeDecay"),
    "functions of the backend": (
        "import keras\nfrom keras import backend as K\nK.mean(x)\n",
        "keras.ops",
    ),
    "graphs": (
        "import tensorflow as tf\nx = tf.placeholder(tf.float32)\nwith tf.Session() as s: pass\n",
        "tf.placeholder, tf.Session",
    ),
    "more than a session": (
        """
        import tensorflow as tf
        config = tf.ConfigProto()
        config.graph_options.rewrite_options.auto_mixed_precision = 1
        tf.keras.backend.set_session(tf.Session(config=config))
        """,
        "Write what this session sets",
    ),
    "a session inside another call": (
        "import tensorflow as tf\nprint(tf.keras.backend.set_session(tf.Session()))\n",
        "Write what this session sets",
    ),
    "a transformed converter": (
        """
        TORCH
        from petastorm.spark import make_spark_converter
        converter = make_spark_converter(df)
        def train():
            hvd.init()
            with converter.make_torch_dataloader(cur_shard=rank, transform_spec=spec) as rows:
                pass
        HorovodRunner(np=2).run(train)
        """,
        "transform_spec becomes transform=",
    ),
    "a converter without shards": (
        """
        TORCH
        from petastorm.spark import make_spark_converter
        converter = make_spark_converter(df)
        def train():
            with converter.make_torch_dataloader() as loader:
                pass
        HorovodRunner(np=2).run(train)
        """,
        "without cur_shard every rank reads all rows",
    ),
    "a converter that a helper uses": (
        """
        TORCH
        from petastorm.spark import make_spark_converter
        converter = make_spark_converter(df)
        def loader():
            return converter.make_torch_dataloader(cur_shard=hvd.rank())
        def train():
            hvd.init()
            return loader()
        HorovodRunner(np=2).run(train)
        """,
        "the function of run does not use it directly",
    ),
    "a reader": (
        """
        from petastorm import make_batch_reader
        make_batch_reader(url, cur_shard=hvd.rank(), shard_count=hvd.size())
        """,
        "differ in their number of batches",
    ),
    "the latest checkpoint": (
        "import tensorflow as tf\ntf.train.latest_checkpoint(folder)\n",
        "not the files of Keras 3",
    ),
    "several GPUs": ("TORCH\nmodel = torch.nn.DataParallel(model)\n", "A rank has one GPU"),
    "a GPU of the environment": (
        "import os\nTORCH\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'\n",
        "A rank has its GPU already",
    ),
}
# Code of today, and code that says that it is for Keras 2.
LEFT = {
    "a path that grows": """
        import keras
        from settings import *
        path = "/dbfs" + path
        keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
        """,
    "a training as in the docs": """
        KERAS
        rate = 0.001 * hvd.size()
        opt = hvd.DistributedOptimizer(tf.keras.optimizers.Adam(rate))
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        model.fit(x, y, callbacks=callbacks)
        """,
    "a training in several functions": """
        TORCH

        def begin():
            hvd.init()
            return hvd.size()

        def share(net, opt):
            hvd.broadcast_parameters(net.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(opt, root_rank=0)

        def build(size):
            net = torch.nn.Linear(1, 1)
            opt = torch.optim.SGD(net.parameters(), lr=0.1 * size)
            opt = hvd.DistributedOptimizer(opt)
            share(net, opt)
            return opt

        def train():
            size = begin()
            opt = build(size)
            print(hvd.rank())

        HorovodRunner(np=2).run(train)
        """,
    "a module whose caller starts Horovod": """
        import horovod.torch as hvd

        def rank():
            return hvd.rank()
        """,
    "keras-2-on-purpose": """
        from horovod_runner import HorovodRunner
        import tensorflow as tf

        def train():
            import horovod.tensorflow.keras as hvd
            hvd.init()
            model.compile("sgd", experimental_run_tf_function=False)
            model.fit_generator(rows, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

        HorovodRunner(np=2, env={"TF_USE_LEGACY_KERAS": "1"}).run(train)
        """,
    "gpus-hidden-on-purpose": """
        import os
        TORCH

        def train():
            os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
            hvd.init()

        HorovodRunner(np=2).run(train)
        """,
    "init that is called again": """
        import horovod.torch as hvd
        hvd.init()
        for _ in range(2):
            hvd.barrier()
            hvd.shutdown()
            hvd.init()
        """,
    "a warm-up beside other arguments": """
        KERAS
        opt = tf.keras.optimizers.Adam(learning_rate=0.1)
        warmup = hvd.callbacks.LearningRateWarmupCallback(**options)
        """,
    "attributes of others": "import keras\nlr = self.lr\nx = self.variables()\nx.cuda(0)\n",
}


def code(text: str) -> str:
    """A text without its indentation, and with what its words stand for."""
    text = dedent(text)
    for name, meaning in WORDS.items():
        text = re.sub(rf"\b{name}\b", meaning, text)
    return text


def side(text: str, other: str) -> str:
    """One side of a change, without the lines whose mark is that of the other side."""
    lines = dedent(text).strip("\n").split("\n")
    return code("\n".join(line[2:] for line in lines if line[:1] != other)) + "\n"


@pytest.mark.parametrize("name", CHANGED)
def test_old_code_is_changed_and_changed_no_more(name: str) -> None:
    old, new = (side(CHANGED[name], other) for other in "+-")
    result = rewrite(old, "train.py")
    assert result.text == new
    assert result.found
    assert all(found.why for found in result.found)
    again = rewrite(result.text, "train.py")
    assert again.text == new
    assert [found for found in again.found if found.new_line is None] == []


@pytest.mark.parametrize("name", TOLD)
def test_what_cannot_be_changed_safely_is_told(name: str) -> None:
    text, words = TOLD[name]
    told = [found for found in rewrite(code(text), "train.py").found if found.new_line]
    assert any(words in found.why for found in told)


@pytest.mark.parametrize("name", LEFT)
def test_other_code_is_left_alone(name: str) -> None:
    text = code(LEFT[name])
    assert rewrite(text, "train.py") == (text, [])


def test_lines_are_those_of_the_text_before() -> None:
    text = "import horovod.spark.torch\nfrom sparkdl import HorovodRunner\n\nHorovodRunner(np=0)\n"
    found = [(found.line, found.new_line) for found in rewrite(text, "train.py").found]
    assert found == [(1, None), (2, None), (4, 8)]


def test_a_file_is_shown_and_written_only_if_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.py"
    old = b"from sparkdl import HorovodRunner\r\n\r\nHorovodRunner(np=0).run(print)\r\n"
    path.write_bytes(old)
    assert cli.main(["migrate", str(path)]) == 0
    assert path.read_bytes() == old
    shown = capsys.readouterr().out
    assert "-from sparkdl import HorovodRunner\n+from horovod_runner import Horovod" in shown
    assert f"{path}, line 1: changed. sparkdl left Databricks' runtimes" in shown
    assert f"{path}, line 3: by hand. np=0" in shown
    assert shown.endswith("1 change shown; --write writes it, 1 place to change by hand.\n")
    assert cli.main(["migrate", str(path), "--write"]) == 0
    assert path.read_bytes() == old.replace(b"sparkdl", b"horovod_runner")


def test_a_notebook_keeps_all_but_the_changed_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = [
        ("markdown", "# Old"),
        (
            "code",
            "%pip install sparkdl \\\n  petastorm\nimport torch\nfrom sparkdl import HorovodRunner",
        ),
        ("code", "%sql\nselect 1 -- no Python"),
        ("code", "print 'Python 2'"),
        ("code", "import horovod.torch as hvd\nfiles = !ls\n!ls {files}\nhvd?"),
        ("code", "def train():\n    %time x = 1\n    return hvd.rank()\n"),
        ("code", "HorovodRunner(np=2).run(train)"),
    ]
    notebook = {
        "cells": [
            {"cell_type": kind, "metadata": {"a": "ä"}, "source": text.splitlines(keepends=True)}
            for kind, text in cells
        ],
        "nbformat": 4,
    }
    path = tmp_path / "old.ipynb"
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
    assert cli.main(["migrate", str(path), "--write"]) == 0
    shown = capsys.readouterr().out
    assert f"{path}, cell 2, line 4: changed. sparkdl" in shown
    assert f"{path}, cell 6, line 3: changed. train uses Horovod" in shown
    assert "cell 4: skipped, because it is not Python 3" in shown
    written = path.read_text()
    sources = ["".join(cell["source"]) for cell in json.loads(written)["cells"]]
    new = [text for _, text in cells]
    new[1] = new[1].replace("from sparkdl", "from horovod_runner")
    new[5] = "def train():\n    hvd.init()\n    %time x = 1\n    return hvd.rank()\n"
    assert sources == new
    assert written.startswith('{\n "cells": [\n  {\n   "cell_type"')
    assert '"ä"' in written
    assert written.endswith("}\n")
    assert not path.with_suffix(".py").exists()


@pytest.mark.parametrize(
    "magic",
    [
        *("%%time", "%%timeit -n 3", "%%capture out", "%%prun", "%conda install x", "%run x.py"),
        *("!{sys.executable} -m pip install x", "! pip install x"),
    ],
)
def test_python_below_a_magic_line_is_changed(tmp_path: Path, magic: str) -> None:
    path = tmp_path / "old.ipynb"
    cell = {"cell_type": "code", "source": f"{magic}\nfrom sparkdl import HorovodRunner"}
    path.write_text(json.dumps({"cells": [cell]}))
    assert cli.main(["migrate", str(path), "--write"]) == 0
    (new,) = json.loads(path.read_text())["cells"]
    assert new["source"] == f"{magic}\nfrom horovod_runner import HorovodRunner"


@pytest.mark.parametrize(
    "first", [b"\xef\xbb\xbf# \xc3\xa9\n", b"# coding: latin-1\n# \xe9\n"], ids=["mark", "line"]
)
def test_a_file_keeps_its_encoding(tmp_path: Path, first: bytes) -> None:
    path = tmp_path / "old.py"
    path.write_bytes(first + b"from sparkdl import HorovodRunner\n")
    assert cli.main(["migrate", str(path), "--write"]) == 0
    assert path.read_bytes() == first + b"from horovod_runner import HorovodRunner\n"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("old.py", "print 'x'\n", "old.py, line 1: this is not Python 3"),
        ("old.txt", "", "neither a .py file nor a .ipynb notebook"),
        ("old.ipynb", "[]", "is not a notebook of version 4"),
        ("missing.py", None, "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_one_line_and_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str | None, words: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    assert cli.main(["migrate", str(tmp_path / name)]) == 1
    assert words in capsys.readouterr().err


def test_without_libcst_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "horovod_runner.tools.migrate.rewrite")
    monkeypatch.setitem(sys.modules, "libcst", None)
    for name in [
        name for name in sys.modules if name.startswith("horovod_runner.tools.migrate.code")
    ]:
        monkeypatch.delitem(sys.modules, name)
    assert cli.main(["migrate", "train.py"]) == 1
    assert "pip install 'horovod_runner[migrate]'" in capsys.readouterr().err


def test_ranks_and_the_other_commands_do_without_libcst() -> None:
    commands = "horovod_runner.tools.commands"
    modules = f"horovod_runner.worker.old_keras, {commands}.migrate, horovod_runner.worker.main"
    code = f"import sys, {commands}.cli, {modules}; sys.exit('libcst' in sys.modules)"
    assert run_python(code).returncode == 0
