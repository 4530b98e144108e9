from .pack_columns import PackColumns as PackColumns, PackField as PackField
from .pack_columns import PackSample as PackSample, ShardContent as ShardContent
from .pack_columns import rewrite_source as rewrite_source, shard_batch as shard_batch
from .pack_columns import write_shard as write_shard
from .pack_format import PackFormat as PackFormat, PackRows as PackRows
from .pack_format import PackShard as PackShard
from .pack_forms import block_bounds as block_bounds, block_rows as block_rows
from .pack_forms import pack_form as pack_form, pack_forms as pack_forms
