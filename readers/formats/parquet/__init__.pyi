from . import parquet_chunks as parquet_chunks
from .parquet_footer import MAX_FOOTER_BYTES as MAX_FOOTER_BYTES, as_file as as_file
from .parquet_footer import parse_footer as parse_footer
from .thrift import Long as Long, Raw as Raw, ThriftReader as ThriftReader
from .thrift import write_struct as write_struct
