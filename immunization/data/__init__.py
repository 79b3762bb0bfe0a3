"""Data sets: each is one function that takes the keys of its YAML (conf/dataset), which says what they mean.

Each returns a `TaskPair` or an `ImagePair`. They raise ConfigError for an option that cannot be, DataError for files
that are absent, damaged or do not fit together.
"""

from immunization.data.arrays import arrays
from immunization.data.house_prices import house_prices
from immunization.data.image_folders import image_folders
from immunization.data.pixels import digits, fashion_mnist, mnist
from immunization.data.preparation import finish, split_rows, standardize, standardize_targets
from immunization.data.small_images import cifar10, digits_deep
from immunization.data.task import Origin, Split, Task, TaskPair
from immunization.data.text import text
