from .parquet_format import MAX_FOOTER_BYTES as MAX_FOOTER_BYTES, ParquetFile as ParquetFile
from .parquet_format import as_file as as_file
from .thrift import Long as Long, Raw as Raw, ThriftReader as ThriftReader
from .thrift import write_struct as write_struct
