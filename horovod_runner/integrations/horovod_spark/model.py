"""What Horovod's models share: predictions as columns with Horovod's names and types."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pyspark.ml import Model

from horovod_runner.common.spark_session import quoted
from horovod_runner.data.scoring.models.kind import Recognized
from horovod_runner.data.scoring.predict import predict
from horovod_runner.integrations.horovod_spark.batches import Arrange, in_order
from horovod_runner.integrations.horovod_spark.params import ModelParams
from horovod_runner.integrations.spark_ml.persistence import Saveable

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from horovod_runner.results.run import Run


class HorovodModel(Model, ModelParams, Saveable):  # type: ignore[misc]
    """Adds predictions to a DataFrame; base of Horovod's models.

    The columns are named ``label__output`` by default; ``setOutputCols`` renames them. A prediction
    of one number has its label's type, and a longer one is a vector.
    """

    #: The record of the run that trained it; None after ``load``.
    run: Run | None = None
    #: The defaults of the Params that only this framework's model has.
    _own_defaults: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, **params: Any) -> None:
        super().__init__()
        self._setDefault(**self._own_defaults)
        if params.get("label_columns"):
            self.setOutputCols([f"{name}__output" for name in params["label_columns"]])
        self._set(**params)

    def _scored(self, columns: Mapping[str, str]) -> Recognized:
        """What computes the outputs, and its kind; ``columns`` as for :meth:`_arrange`."""
        return Recognized(self._kind(), self.getModel())

    @abstractmethod
    def _arrange(self, columns: Mapping[str, str]) -> Arrange:
        """Return what gives inputs the model's shapes and types, by the column of each part."""

    def _transform(self, dataset: DataFrame) -> DataFrame:
        from pyspark.sql import functions

        outputs, labels = self.getOutputCols(), self.getLabelColumns()
        columns = in_order(self.getFeatureColumns())
        scored = predict(
            dataset,
            self._scored(columns),
            columns,
            outputs,
            batch_size=1024,
            transform=self._arrange(columns),
        )
        converted = {}
        for output, label in zip(outputs, labels, strict=True):
            of_label = (self.getOrDefault("_metadata") or {}).get(label) or {}
            wanted = of_label.get("spark_data_type")
            type_ = scored.schema[output].dataType.simpleString()
            converted[output] = _as_label(functions.col(quoted(output)), type_, wanted)
        return scored.withColumns(converted)


def _as_label(column: Column, type_: str, wanted: Any) -> Column:
    """A prediction as Horovod's models return it; ``wanted`` is the class of its label's type."""
    from pyspark.ml.functions import array_to_vector
    from pyspark.sql import functions
    from pyspark.sql.types import DecimalType, IntegralType, NumericType

    is_vector = getattr(wanted, "__name__", "") in ("DenseVector", "SparseVector")
    if type_.startswith("array<") and not type_.startswith("array<array"):
        return array_to_vector(column.cast("array<double>"))
    if is_vector:
        return array_to_vector(functions.array(column.cast("double")))
    is_number = isinstance(wanted, type) and issubclass(wanted, NumericType)
    if not is_number or issubclass(wanted, DecimalType):
        return column.cast("double") if type_ == "float" and wanted is None else column
    if issubclass(wanted, IntegralType):
        column = functions.round(column)
    return column.cast(wanted())
